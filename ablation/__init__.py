"""What ablate.py measures before training, and what it tells of it all."""
