from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_configs.load import ConfigError, dump_config, load_config
from lachesis_configs.schema import Config

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def lines(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.lines)
    return list(caught.value.lines)


def test_empty_file_is_the_default(write):
    assert load_config(write("")) == Config()


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_load_and_round_trip(path, write):
    config = load_config(path)
    assert load_config(write(dump_config(config))) == config


def test_demo_has_the_measured_settings():
    config = load_config(next(p for p in PRESETS if p.stem == "demo"))
    (environment,) = config.environments
    assert (config.run.steps, config.queue.batch_groups, environment.group_size) == (40, 8, 8)
    assert (config.learner.lr, config.learner.betas, config.learner.max_grad_norm) == (2e-5, (0.9, 0.999), 1.0)
    assert (config.learner.correction.clip_low, config.learner.correction.clip_high) == (0.2, 0.28)
    assert environment.options == {"max_value": 20, "max_new_tokens": 16, "eval_problems": 100}
    assert config.actor.advantages == "group"


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "1.0e-6", ".000001", "+1e-06", "0.000_001"])
def test_numbers_are_numbers_in_files_and_overrides(write, number):
    assert load_config(write(f"learner: {{lr: {number}}}")).learner.lr == 1e-6
    assert load_config(write(""), [f"learner.lr={number}"]).learner.lr == 1e-6


def test_whole_numbers_pass_for_floats_but_not_the_other_way_round(write):
    assert load_config(write("learner: {max_grad_norm: 3}")).learner.max_grad_norm == 3.0
    assert lines(write("learner: {ranks: 2.5}")) == ["learner.ranks: value 2.5, expected a whole number"]
    assert lines(write("learner: {ranks: 1e0}")) == ["learner.ranks: value 1.0, expected a whole number"]


def test_yaml_1_1_traps(write):
    config = load_config(write("environments: [{path: a, options: {x: 1:30, y: yes, z: no, o: 0o17, d: 2020-01-01}}]"))
    assert config.environments[0].options == {"x": "1:30", "y": "yes", "z": "no", "o": "0o17", "d": "2020-01-01"}
    assert lines(write("learner: {share_prompts: yes}")) == [
        "learner.share_prompts: value 'yes', expected true or false"
    ]


def test_overrides_apply_in_order_after_the_file(write):
    config = load_config(
        write("run: {steps: 3}\nenvironments: [{path: gsm8k, name: a}, {path: arithmetic, name: b, workers: 2}]"),
        [
            "run.steps=5",
            "run.steps=7",
            "environments.1.workers=4",
            "environments.0.options.data=some/folder",
            "environments.2.name=c",
            "learner.correction={name: tis, cap: 3}",
            "actor.gpus=null",
            "learner.betas=[0.8, 0.9]",
        ],
    )
    assert config.run.steps == 7
    assert [(e.path, e.name, e.workers) for e in config.environments] == [
        ("gsm8k", "a", 16),
        ("arithmetic", "b", 4),
        ("arithmetic", "c", 16),
    ]
    assert config.environments[0].options == {"data": "some/folder"}
    assert (config.learner.correction.name, config.learner.correction.cap) == ("tis", 3.0)
    assert config.learner.betas == (0.8, 0.9)


def test_override_of_a_list_item_that_only_the_default_has(write):
    config = load_config(write("run: {name: x}"), ["environments.0.workers=4"])
    assert config.environments == [Config().environments[0].model_copy(update={"workers": 4})]


def test_override_of_a_text_knob_keeps_what_was_typed(write):
    config = load_config(write(""), ["learner.cores=0", "run.name=007", "actor.engine.cores='1'"])
    assert (config.learner.cores, config.run.name, config.actor.engine.cores) == ("0", "007", "1")


def test_every_mistake_is_reported_with_its_key_value_and_expectation(write):
    path = write(
        """
        run: {name: 5, stepz: 3}
        learner:
          clip_hi: 3
          betas: [0.9, x]
          correction: {name: pop, clip_high: -1}
        queue: {address: "127.0.0.1:1"}
        actor: {engine: {arguments: {x: [1]}}, gpus: [a]}
        environments: [{path: gsm8k, grup_size: 4, workers: yes}]
        weights: 4
        staleness: {late: drip}
        """
    )
    assert sorted(lines(path, "learner.decay=.nan", "lr=3", "environments.5.x=1", "nonsense")) == sorted(
        [
            "override 'nonsense': expected key=value with a dotted key, such as learner.lr=1e-6",
            "environments.5: no such item, expected a number from 0 to 1",
            "run.name: value 5, expected text (in quotes where it looks like a number or true, false, null)",
            "run.stepz: unknown key, value 3, did you mean run.steps?",
            "learner.clip_hi: unknown key, value 3, did you mean learner.correction.clip_high?",
            "learner.betas.1: value 'x', expected a number",
            "learner.correction.name: value 'pop', expected one of none, ppo, tis, decoupled, dppo; did you mean ppo?",
            "learner.correction.clip_high: value -1, expected more than 0.0",
            "learner.decay: value nan, expected a finite number",
            "queue.address: value '127.0.0.1:1', expected tcp://HOST:PORT",
            "actor.engine.arguments.x: value [1], expected text (in quotes where it looks like a number or true, "
            "false, null) or a whole number or a number or true or false",
            "actor.gpus.0: value 'a', expected a whole number",
            "environments.0.grup_size: unknown key, value 4, did you mean environments.0.group_size?",
            "environments.0.workers: value 'yes', expected a whole number",
            "weights: value 4, expected a map of keys",
            "staleness.late: value 'drip', expected one of wait, drop, mask_tokens; did you mean drop?",
            "lr: unknown key, value 3, did you mean learner.lr?",
        ]
    )


def test_files_that_are_no_configuration(tmp_path, write):
    assert lines(tmp_path / "none.yaml") == [
        f"{tmp_path / 'none.yaml'}: cannot be read (No such file or directory), expected a YAML file"
    ]
    assert lines(path := write("- a\n- b"))[0].startswith(f"{path}: ['a', 'b'], expected a map of sections (run, model")
    assert lines(path := write("run:\n  steps: [1"))[0].startswith(f"{path}, line 2: ")
    assert lines(path := write("run: {steps: 1}\nrun: {steps: 2}")) == [
        f"{path}, line 2: the key 'run' is given twice, expected valid YAML"
    ]
    assert lines(path := write("? [a]\n: 1")) == [f"{path}, line 1: a key that is not a word, expected valid YAML"]
    assert lines(path := write("run: !!python/object:os.system {}"))[0].startswith(f"{path}, line 1: could not deter")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["queue.address=tcp://10.0.0.1:5"],
            "queue.address: value 'tcp://10.0.0.1:5', expected a loopback address such as tcp://127.0.0.1:5, "
            "or keys: set run.keys to a folder made by `lachesis keys`",
        ),
        (
            ["queue.address=tcp://127.0.0.1:99999"],
            "queue.address: value 'tcp://127.0.0.1:99999', expected a port up to 65535",
        ),
        (
            ["queue.address=tcp://127.0.0.1:5711"],
            "weights.address: value 'tcp://127.0.0.1:5711' is queue.address, expected another port",
        ),
        (
            ["actor.engine.tensor_parallel=2", "actor.gpus=[0]"],
            "actor.gpus: value [0], expected 2 devices: 2 (actor.engine.tensor_parallel) for each of 1 actors "
            "(actor.count)",
        ),
        (["actor.gpus=[3,3]"], "actor.gpus: value [3, 3], expected no device twice"),
        (["learner.gpus=[0,1]"], "learner.gpus: value [0, 1], expected 1 devices, one a rank (learner.ranks)"),
        (["learner.betas=[0.9,1]"], "learner.betas: value [0.9, 1.0], expected two numbers from 0 to below 1"),
        (
            ["environments.1.path=gsm8k"],
            "environments.1.name: value 'arithmetic' is the name of environments.0, expected a name of its own",
        ),
        (
            ["environments.0.max_token_length=4096"],
            "environments.0.max_token_length: value 4096, expected at most 1024 (actor.engine.max_model_len)",
        ),
    ],
)
def test_knobs_that_contradict_each_other(write, overrides, expected):
    assert lines(write(""), *overrides) == [expected]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_override_text_gives_a_config_or_a_config_error(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "empty.yaml"
    path.touch()
    for override in (text, f"run.{text}", f"environments.{text}", f"learner.lr={text}", f"run.name={text}"):
        with suppress(ConfigError):
            load_config(path, [override])
