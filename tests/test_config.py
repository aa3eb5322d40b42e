from __future__ import annotations

import dataclasses

import pytest
import yaml

from privet.config import CONF_DIR, GROUPS, Config, compose, options, split_overrides
from privet.errors import ConfigError

CSV = ["task=csv", "task.path=/data/rows.csv", "task.labels=[no,yes]", "task.test_rows=10"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_default_is_the_main_job() -> None:
    config = compose()
    assert (config.method.name, config.task.name, config.privacy.epsilon) == ("fedhsip", "tweets", 6.0)
    assert config.privacy.private


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("privacy.epsilom=3", ["privacy.epsilom", "did you mean 'privacy.epsilon'"]),
        ("epsilon=3", ["did you mean 'privacy.epsilon'"]),
        ("method=fedhsp", ["'fedhsp'", "did you mean 'fedhsip'", "ffa_lora"]),
        ("task=tweet", ["did you mean 'tweets'"]),
        ("model.lora.rnk=4", ["did you mean 'model.lora.rank'"]),
        ("privacy.epsilon=0", ["privacy.epsilon = 0", "greater than 0"]),
        ("privacy.epsilon=-2", ["privacy.epsilon = -2", "greater than 0"]),
        ("privacy.epsilon=abc", ["privacy.epsilon = 'abc'", "a number"]),
        ("privacy.epsilon=inf", ["privacy.epsilon = inf", "finite"]),
        ("privacy.epsilon=null", ["privacy=dp needs a number"]),
        ("privacy.delta=1", ["privacy.delta = 1", "less than 1"]),
        ("model.lora.rank=0", ["model.lora.rank = 0", "at least 1"]),
        ("model.lora.rank=2.5", ["model.lora.rank = 2.5", "a whole number"]),
        ("federation.sampled=9", ["federation.sampled = 9", "at most federation.clients = 4"]),
        ("federation.min_replies=5", ["federation.min_replies = 5", "at most"]),
        ("train.local_epochs=1", ["exactly one of train.local_steps"]),
        ("train.optimizer=sdg", ["train.optimizer = sdg", "did you mean 'sgd'", "adamw"]),
        ("train.optimizer=true", ["train.optimizer"]),
        ("task.labels=[only]", ["at least two"]),
        ("task.labels=positive", ["task.labels", "a list"]),
        ("task.head=frozn", ["did you mean 'frozen'"]),
        ("+train.speed=3", ["write train.speed=VALUE"]),
        ("train.lr", ["key=value"]),
        ("seed=1,2", ["one value a run"]),
        ("seed=-1", ["seed = -1", "at least 0"]),
        ("method.assignmnt=random", ["did you mean 'method.assignment'"]),
    ],
)
def test_wrong_settings_give_one_helpful_line(override: str, words: list[str]) -> None:
    text = refusal(override)
    for word in words:
        assert word in text


def test_budget_without_privacy_is_refused() -> None:
    assert "no effect with privacy=none" in refusal("privacy=none", "privacy.epsilon=3")


def test_missing_value_is_named() -> None:
    assert refusal("task=csv").startswith("task.path is missing")


def test_bare_words_and_types() -> None:
    config = compose(["method=ffa_lora", "privacy.epsilon=3", "federation.clients=4", "seed=1"])
    assert (config.privacy.epsilon, config.federation.clients, config.seed) == (3.0, 4, 1)
    assert isinstance(config.privacy.epsilon, float)


def test_lr_and_optimizer_are_the_methods_own_until_they_are_set() -> None:
    assert compose(["method.tuned.dp.lr=3"]).train.lr == 3
    assert compose(["privacy=none", "method.tuned.none.lr=4"]).train.lr == 4
    assert compose(["train.lr=0.5"]).train.lr == 0.5
    assert [compose([f"privacy={p}"]).train.optimizer for p in ("dp", "none")] == ["sgd", "adamw"]


def test_the_warmups_rate_is_its_optimizers() -> None:
    """AdamW moves every coordinate by the rate, so that SGD's 0.5 would ruin the model in a step."""
    rates = [compose(["method=fedhsip", f"privacy={p}"]).method.params["warmup_lr"] for p in ("dp", "none")]
    assert rates == [0.5, None]
    set_by_hand = compose(["method=fedhsip", "privacy=none", "method.warmup_lr=0.01"])
    assert set_by_hand.method.params["warmup_lr"] == 0.01


def test_json_round_trip_keeps_everything_and_the_hash_sees_every_change() -> None:
    config = compose(CSV)
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.hash == config.hash
    changed = dataclasses.replace(config, seed=config.seed + 1)
    assert changed.hash != config.hash


def test_config_from_the_wire_is_checked_like_one_from_text() -> None:
    raw = compose().to_dict()
    raw["privacy"]["epsilon"] = -1
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        Config.from_dict(raw)
    raw = compose().to_dict()
    raw["extra"] = 1
    with pytest.raises(ConfigError, match="extra"):
        Config.from_dict(raw)
    for text in ("[]", "{", '"x"', "{}"):
        with pytest.raises(ConfigError):
            Config.from_json(text)


def test_split_overrides_reads_quotes_as_a_shell() -> None:
    assert split_overrides("a=1 b='x y'") == ["a=1", "b=x y"]
    with pytest.raises(ConfigError):
        split_overrides("a='1")


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_says_what_it_is_how_to_launch_and_how_to_override(group: str) -> None:
    for name in options(group):
        text = (CONF_DIR / group / f"{name}.yaml").read_text()
        header = [line for line in text.splitlines() if line.startswith("#")]
        assert len(header) >= 4
        assert any("Launch:" in line for line in header)
        assert any("Override:" in line for line in header)
        values = yaml.safe_load(text)
        assert values.get("name", name) == name


@pytest.mark.parametrize("method", options("method"))
@pytest.mark.parametrize("privacy", options("privacy"))
def test_every_method_composes_private_and_not(method: str, privacy: str) -> None:
    config = compose([f"method={method}", f"privacy={privacy}"])
    assert config.method.name == method
    assert config.privacy.private == (privacy == "dp")
