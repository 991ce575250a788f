"""One of several processes that torchrun starts for test_train.py: train in DTYPE, and leave the
final weights in FOLDER/rank<N>.safetensors."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import config
import train


def main() -> None:
    folder, dtype, argv = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_default_dtype(getattr(torch, dtype))
    runs, original = [], train.set_up
    train.set_up = lambda *args: runs.append(original(*args)) or runs[0]
    train.train(config.parse(config.TrainConfig, argv, prog="train.py", description=""))
    save_file(runs[0].model.state_dict(), folder / f"rank{os.environ['RANK']}.safetensors")


if __name__ == "__main__":
    main()
