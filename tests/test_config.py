"""Options: one parser for command lines and presets, and the checks across options."""

import dataclasses
from pathlib import Path

import pytest

import ablate
import config
from config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

FOLDER = Path(config.__file__).parent
PRESETS = sorted(FOLDER.glob("*.toml"))


def parse(*argv: str) -> dict[str, object]:
    """The options of a command line by name."""
    return config.flat(whole(*argv))


def whole(*argv: str) -> TrainConfig:
    return config.parse(TrainConfig, list(argv), prog="train.py", description="A test.")


def exit_code(*argv: str) -> int:
    """What the program gives back to the shell."""
    try:
        return config.run_program(lambda argv: 0 if whole(*argv) else 1, list(argv))
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def preset(tmp_path):
    """Writes a preset and gives its path, as the first argument of a command line."""

    def write(text: str) -> str:
        path = tmp_path / "preset.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--lr=1"], "lr", 1.0),
        (["--lr", "1"], "lr", 1.0),
        (["--lr=1e-3"], "lr", 0.001),
        (["--min-lr=0"], "min_lr", 0.0),
        (["--min-lr", "None"], "min_lr", None),
        (["--n_layer=4"], "n_layer", 4),
        (["--n-layer", "4"], "n_layer", 4),
        (["--n-layer=4"], "n_layer", 4),
        (["--n_layer", "4"], "n_layer", 4),
        (["--post-ln"], "post_ln", True),
        (["--no-post-ln"], "post_ln", False),
        (["--no_post_ln"], "post_ln", False),
        (["--post-ln", "true"], "post_ln", True),
        (["--post_ln=True"], "post_ln", True),
        (["--post-ln=false"], "post_ln", False),
        (["--post-ln", "--no-post-ln"], "post_ln", False),
        (["--no-decay-embeddings"], "decay_embeddings", False),
        (["--compile=false"], "compile", "false"),
        (["--compile", "true"], "compile", "true"),
        (["--final-norm=true"], "final_norm", True),
        (["--final-norm", "False"], "final_norm", False),
        (["--final-norm=none"], "final_norm", None),
        (["--corpus=123"], "corpus", "123"),
        (["--corpus=a=b"], "corpus", "a=b"),
        (["--corpus", "true"], "corpus", "true"),
        (["--out-dir", "a_b/c"], "out_dir", Path("a_b/c")),
        (["--seed=1", "--seed=2"], "seed", 2),
    ],
)
def test_an_option_is_understood_in_every_usual_form(argv, name, value):
    got = parse(*argv)
    assert got.pop(name) == value
    rest = config.flat(TrainConfig())
    rest.pop(name)
    assert got == rest


def test_an_integer_given_for_a_float_becomes_a_float():
    assert type(parse("--lr=1")["lr"]) is float


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr = 1", "lr", 1.0),
        ("n-layer = 4", "n_layer", 4),
        ("post_ln = true", "post_ln", True),
        ("post_ln = false", "post_ln", False),
        ("final_norm = true", "final_norm", True),
        ("compile = false", "compile", "false"),
        ('compile = "true"', "compile", "true"),
        ('corpus = "true"', "corpus", "true"),
        ('corpus = "--lr=3"', "corpus", "--lr=3"),
        ('out_dir = "a b"', "out_dir", Path("a b")),
        ("# nothing", "lr", 6e-4),
    ],
)
def test_a_preset_sets_options_with_toml_values(preset, text, name, value):
    assert parse(preset(text))[name] == value


@pytest.mark.parametrize("later", [["--n-layer=3"], ["--n_layer", "3"]])
def test_the_command_line_beats_the_preset(preset, later):
    got = parse(preset("n_layer = 5\npost_ln = true\nlr = 0.5"), *later, "--no-post-ln")
    assert (got["n_layer"], got["post_ln"], got["lr"]) == (3, False, 0.5)


# What is wrong, as a command line and as a preset, and what the message must name.
WRONG = {
    "a misspelt name": (["--batch_toknes=8"], "batch_toknes = 8", ["--batch-tokens"]),
    "a name that lacks a letter": (["--warmup-step=8"], "warmup_step = 8", ["--warmup-steps"]),
    "a name that lacks a hyphen": (["--nlayer", "8"], "nlayer = 8", ["--n-layer"]),
    "no number": (["--lr=fast"], 'lr = "fast"', ["--lr", "fast"]),
    "a fraction for an integer": (["--n-layer=4.5"], "n_layer = 4.5", ["--n-layer", "4.5"]),
    "a bool for an integer": (["--n-layer=true"], "n_layer = true", ["--n-layer", "true"]),
    "a word for a bool": (["--post-ln=maybe"], 'post_ln = "maybe"', ["post-ln", "maybe"]),
    "a number for a bool": (["--post-ln=1"], "post_ln = 1", ["post-ln"]),
    "a list": (["--steps", "1", "2"], "steps = [1, 2]", ["2"]),
    "outside the choices": (["--norm=batch"], 'norm = "batch"', ["--norm", "batch", "rmsnorm"]),
    "no choice but similar": (["--dtype=half"], 'dtype = "half"', ["--dtype", "float16"]),
    "the vocabulary, which the tokenizer decides": (
        ["--vocab-size=9"],
        "vocab_size = 9",
        ["vocab-size"],
    ),
}


@pytest.mark.parametrize("where", ["command line", "preset"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_exits_with_2_and_is_named_alike_in_file_and_command_line(
    wrong, where, preset, capfd
):
    argv, text, named = WRONG[wrong]
    assert exit_code(*([preset(text)] if where == "preset" else argv)) == 2
    message = capfd.readouterr().err
    assert [word for word in named if word not in message] == []


@pytest.mark.parametrize(
    "argv", [["--lr"], ["stray.toml"], ["--seed=1", "stray"], ["-x"], ["--no-lr"]]
)
def test_a_command_line_that_makes_no_sense_exits_with_2(argv, capfd):
    assert exit_code(*argv) == 2
    assert capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[model]\nn_layer = 4", "model"),
        ("model.n_layer = 4", "model"),
        ("n_layer = ", "TOML"),
        ("lr = 1\nlr = 2", "TOML"),
        ("import os\nos.system('touch pwned')", "TOML"),
        ("open('pwned', 'w')", "TOML"),
    ],
)
def test_a_file_that_is_no_flat_toml_is_refused_by_name_and_never_run(
    preset, text, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = preset(text)
    with pytest.raises(ValueError, match=named) as refusal:
        whole(path)
    assert path in str(refusal.value)
    assert not Path("pwned").exists()


def test_a_preset_that_is_not_utf8_or_no_file_is_refused_by_name(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path):
        with pytest.raises(ValueError, match=path.name):
            whole(str(path))


def test_a_missing_preset_is_answered_with_the_nearest_and_all_there_are():
    with pytest.raises(ValueError, match="quikstart") as refusal:
        whole("config/quikstart.toml")
    message = str(refusal.value)
    assert "did you mean config/quickstart.toml?" in message
    assert all(f"config/{p.name}" in message for p in PRESETS)


def test_help_exits_with_0_and_tells_every_option_with_its_meaning_and_default(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")  # wider ones get two columns
    assert exit_code("--help") == 0
    text = capfd.readouterr().out
    options = {"--" + name.replace("_", "-"): v for name, v in config.flat(TrainConfig()).items()}
    lines = [line.strip("│|").strip() for line in text.splitlines()]
    for option, default in options.items():
        at = [i for i, line in enumerate(lines) if line.split(" ")[0].rstrip(",") == option]
        assert len(at) == 1, option
        entry = " ".join(lines[at[0] : at[0] + 3])
        assert f"(default: {default})" in entry, option
        words = entry.split("(default:")[0].removeprefix(option).split()
        assert len(words) >= 3, f"{option} has no meaning"
    assert "--vocab-size" not in text


VARIANTS = [
    TrainConfig(),
    TrainConfig(
        ModelConfig(n_layer=2, post_ln=True, final_norm=True, norm="rmsnorm", branch_init="zero"),
        DataConfig(corpus="true", tokenizer="byte"),
        OptimizerConfig(lr=1e-5, min_lr=0.0, beta1=0.123456789012345, decay_embeddings=False),
        RunConfig(seed=0, compile="false", init_from="gpt2", device="cuda:1", dtype="float16"),
    ),
    TrainConfig(
        ModelConfig(final_norm=False, dropout=0.1), optimizer=OptimizerConfig(lr=3.0, grad_clip=0.0)
    ),
]
AWKWARD = [
    "it's",
    'a "quoted" b',
    "back\\slash\\n",
    "tab\tand\nnewline",
    "Ünï/∩😀 日本",
    "# no comment = [x]",
    "--lr=3",
    " blanks ",
    "'''",
    "\x01\x1f",
    "true",
]


@pytest.mark.parametrize("cfg", VARIANTS, ids=["default", "all kinds", "some"])
def test_a_written_configuration_reads_back_equal(cfg, preset):
    assert whole(preset(config.to_toml(cfg))) == cfg


@pytest.mark.parametrize("name", AWKWARD)
def test_any_path_survives_being_written_and_read(name, preset):
    cfg = TrainConfig(
        data=DataConfig(corpus=name, data_dir=Path(name)),
        run=RunConfig(out_dir=Path(name), init_from=name),
    )
    assert whole(preset(config.to_toml(cfg))) == cfg


def test_resuming_is_an_order_and_is_not_written():
    resumed = TrainConfig(run=RunConfig(resume=True))
    assert config.to_toml(resumed) == config.to_toml(TrainConfig())


def test_each_option_has_one_name_in_all_groups():
    groups = [f.name for f in dataclasses.fields(TrainConfig)]
    names = [
        option.name
        for group in groups
        for option in dataclasses.fields(getattr(TrainConfig(), group))
        if option.name != "vocab_size"
    ]
    assert len(set(names)) == len(names)
    assert set(config.flat(TrainConfig())) == set(names)


def changed(**options) -> TrainConfig:
    """The default configuration with these options, whichever group they are in."""
    cfg = TrainConfig()
    for group in dataclasses.fields(cfg):
        old = getattr(cfg, group.name)
        mine = {k: v for k, v in options.items() if hasattr(old, k)}
        cfg = dataclasses.replace(cfg, **{group.name: dataclasses.replace(old, **mine)})
    return cfg


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_default_configuration_has_no_problem(world_size):
    assert TrainConfig().problems(world_size) == []


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_parses_and_has_no_problem(path):
    cls = ablate.AblationConfig if path.stem.startswith("ablation") else TrainConfig
    parsed = config.parse(cls, [str(path)], prog="program", description="")
    assert parsed.problems() == []


@pytest.mark.skipif(not (FOLDER / "gpt2.toml").exists(), reason="there is no such preset")
def test_the_gpt2_preset_spells_out_the_defaults():
    assert whole(str(FOLDER / "gpt2.toml")) == TrainConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layer", 0),
        ("n_embd", 770),
        ("n_head", 5),
        ("block_size", 0),
        ("dropout", 1.0),
        ("dropout", float("nan")),
        ("init_std", 0.0),
        ("batch_tokens", 0),
        ("batch_tokens", -16384),
        ("micro_batch", 0),
        ("eval_every", 0),
        ("eval_tokens", 1023),
        ("save_every", 0),
        ("keep", 0),
        ("log_every", 0),
        ("sample_tokens", -1),
        ("seed", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("min_lr", 1.0),
        ("min_lr", -1e-9),
        ("min_lr", float("nan")),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("grad_clip", float("nan")),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_an_impossible_value_is_one_problem_that_names_option_and_value(name, value):
    problems = changed(**{name: value}).problems()
    assert len(problems) == 1
    assert name in problems[0]
    assert str(value) in problems[0]


def test_all_problems_are_told_at_once():
    wrong = {"dropout": 2.0, "lr": -1.0, "beta2": 1.5, "steps": 0, "warmup_steps": -3}
    problems = changed(**wrong, eval_tokens=3, batch_tokens=1000).problems()
    wanted = ["dropout", "lr", "steps", "warmup_steps", "beta2", "eval_tokens", "batch_tokens"]
    for name in wanted:
        assert sum(p.startswith(name) for p in problems) == 1, name
    assert len(problems) == len(wanted)


def test_a_run_that_began_with_other_weights_can_be_resumed_from_its_own_preset(preset):
    written = preset(config.to_toml(changed(init_from="gpt2")))
    assert whole(written, "--resume") == changed(init_from="gpt2", resume=True)
    assert whole(written, "--resume").problems() == []


@pytest.mark.parametrize(
    ("tokens", "world_size", "accumulation"),
    [(1024, 1, 16), (1024, 2, 8), (64, 1, 1), (1024, 16, 1)],
)
def test_tokens_per_step_that_are_a_multiple_decide_the_accumulation(
    tokens, world_size, accumulation
):
    cfg = changed(block_size=16, micro_batch=4, batch_tokens=tokens)
    assert cfg.problems(world_size) == []
    assert tokens == 16 * 4 * world_size * accumulation


@pytest.mark.parametrize(
    ("tokens", "world_size", "unit", "near"),
    [
        (1000, 1, 64, "960 or 1024"),
        (1000, 2, 128, "896 or 1024"),
        (1040, 1, 64, "1024 or 1088"),
        (1024, 32, 2048, "2048"),
        (63, 1, 64, "64"),
    ],
)
def test_tokens_per_step_that_are_no_multiple_are_answered_with_the_nearest_ones(
    tokens, world_size, unit, near
):
    cfg = changed(block_size=16, micro_batch=4, batch_tokens=tokens)
    (problem,) = cfg.problems(world_size)
    assert f"batch_tokens {tokens} is not a multiple" in problem
    assert f"= {unit}: take {near}" in problem


def test_tokens_per_step_that_another_micro_batch_would_fit_are_answered_with_it():
    cfg = changed(block_size=128, micro_batch=8, batch_tokens=1024)
    (problem,) = cfg.problems(2)
    assert "micro_batch 4" in problem
    assert changed(block_size=128, micro_batch=4, batch_tokens=1024).problems(2) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("n_head 5 is wrong"), 2),
        (FileNotFoundError("vocab.bpe is not here"), 2),
        (OSError("disk full"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_program_turns_what_a_user_can_cause_into_a_message_and_a_code(error, code, capfd):
    def main(argv):
        raise error

    assert config.run_program(main, []) == code
    out, err = capfd.readouterr()
    assert str(error) in err
    assert "Traceback" not in err
    assert out == ""


def test_a_mistake_of_the_programmer_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        config.run_program(lambda argv: 1 // 0, [])


def test_a_program_gives_back_the_code_of_its_main_and_reads_the_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--seed=3"])
    assert config.run_program(lambda argv: 7 if argv == ["--seed=3"] else 1) == 7
    assert config.run_program(lambda argv: len(argv), []) == 0
