"""What a node says about itself: every key, every odd value, and never a value in what may cross the wire."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.common.config import parse_config_args

from client_app.node_config import NodeConfig
from privet.config import compose
from privet.data.tasks import OwnNames
from privet.errors import Refusal

OWN = {"name": "north", "data-path": "/data/secret.csv"}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        NodeConfig.read(raw)
    assert caught.value.kind == "node-config"
    text = str(caught.value)
    assert "\n" not in text
    assert "secret" not in text
    return text


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("data-path", ["", "  "], "data-path is empty"),
        ("data-path", [True, 1.5, ["secret"], "secret\0.csv"], "data-path is not allowed as it is: a text"),
        ("name", ["secret/x", "..", "secret name", "secr\u00e9t", "x" * 65], "name may hold"),
        ("name", [True, 2.0], "name is not allowed as it is: a text"),
        ("store", ["secret", "./secret"], "store must be an absolute path"),
        ("store", [""], "store is empty"),
        ("store", ["~nosuchuser/secret"], "no such home folder"),
        ("public-examples", [0, -1, 40.5, 40.0, "40", True, 10**13], "a whole number, at least 1"),
        ("partition-id", [-1, 0.5, "0", False], "a whole number, at least 0"),
        ("max-epsilon", [0, -1.0, "3", True, float("inf"), float("nan")], "a number greater than 0"),
        ("max-delta", [0.0, 1, 5.0, "1e-5", float("nan")], "greater than 0 and less than 1"),
        ("allow-non-private", ["true", 1, 0, ""], "true or false, without quotes"),
        ("text-column", ["", True, 1.5], "text-column is"),
        ("pair-column", ["", False], "pair-column is"),
        ("label-column", ["", True], "label-column is"),
        ("labels", ["secret,secret", '["secret", "secret"]', "secret, secret "], "a value stands twice"),
        ("labels", ["secret,", ",", '["secret", " "]', "a,,b"], "a value is empty"),
        ("labels", ["[secret", "[" * 9999, "[secret,b]"], "no JSON list"),
        (
            "labels",
            ['["secret", 1.0]', '["secret", true]', '[["secret"]]', "[null]"],
            "labels is not allowed",
        ),
        ("labels", [True, 0.5], "labels is not allowed as it is: a text"),
        (
            "min-clip",
            [0, -0.5, "1", True, float("inf")],
            "min-clip is not allowed as it is: a number greater",
        ),
        (
            "methods",
            ["secret", "fedask,secret", ",", "FedASK"],
            "methods is not allowed as it is: names such as",
        ),
        ("methods", ["", " "], "methods is empty"),
        ("methods", [True, ["fedask"]], "methods is not allowed as it is: a text"),
        ("code-hash", ["secret", "0123456789ABCDEF", "0" * 15, "0" * 65], "16 to 64 hexadecimal digits"),
        (
            "device",
            ["gpu", "cuda:", "cuda:x", "CPU"],
            "device is not allowed as it is: auto, cpu, cuda or cuda:N",
        ),
        ("model-path", ["secret/model", "./secret"], "model-path must be an absolute path"),
        ("retention-days", [0, -1, 1.5, "30", True], "a whole number, at least 1"),
        ("label", ["secret"], "did you mean 'labels'"),
        ("text_column", ["secret"], "did you mean 'text-column'"),
    ],
)
def test_odd_values_are_refused_in_a_line_without_them(key: str, values: list[Any], words: str) -> None:
    for value in values:
        assert words in refused({**OWN, key: value}), value


def test_what_each_key_gives() -> None:
    node = NodeConfig.read(
        {
            **OWN,
            "text-column": "free text",
            "pair-column": 0,
            "label-column": "Urgent?",
            "labels": "0, 1",
            "image-column": "photo",
            "image-folder": "/data/photos",
            "store": "/data/store",
            "public-examples": 40,
            "max-epsilon": 3,
            "allow-non-private": False,
        }
    )
    assert (node.name, node.data_path, str(node.store)) == ("north", "/data/secret.csv", "/data/store")
    assert node.own == OwnNames("free text", "0", "Urgent?", ("0", "1"), "photo", "/data/photos")
    assert (node.public_examples, node.max_epsilon, node.max_delta) == (40, 3.0, 1e-5)
    assert not node.simulated
    assert not node.allow_non_private
    assert NodeConfig.read({**OWN, "max-delta": 1e-9}).max_delta == 1e-9
    assert NodeConfig.read(OWN).own == OwnNames()


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ('labels="0,1"', ("0", "1")),
        ('labels="no, yes ,not sure"', ("no", "yes", "not sure")),
        ('labels=\'["a, b","c"]\'', ("a, b", "c")),
        ('labels=\'["[x]", "\\u0027y\\u0027", 3]\'', ("[x]", "'y'", "3")),
        ('labels="true,false"', ("true", "false")),
        ("labels=7", ("7",)),
    ],
)
def test_labels_as_flower_reads_them(line: str, labels: tuple[str, ...]) -> None:
    raw = parse_config_args([f'data-path="/data/secret.csv" name="north" {line}'])
    assert NodeConfig.read(raw).own.labels == labels


@pytest.mark.parametrize("key", ["text-column", "pair-column", "label-column", "labels"])
def test_names_of_a_table_need_a_table(key: str) -> None:
    assert f"{key} has no effect without data-path" in refused({"partition-id": 0, key: "secret"})


def test_floors_and_places_of_a_node() -> None:
    node = NodeConfig.read(
        {
            **OWN,
            "min-clip": 1,
            "methods": "fedask, fedhsip",
            "code-hash": "0123456789abcdef",
            "device": "cuda:0",
            "model-path": "/models/minilm",
            "retention-days": 30,
        }
    )
    assert (node.min_clip, node.methods) == (1.0, ("fedask", "fedhsip"))
    assert (node.code_hash, node.retention_days) == ("0123456789abcdef", 30)
    config = compose(["method=ffa_lora", "train.device=cpu", "model.revision=abc"])
    own = node.adapt(config)
    assert (own.train.device, own.model.path, own.model.revision) == ("cuda:0", "/models/minilm", None)
    assert own.model.sha256 == config.model.sha256  # a pin of the run holds for the node's copy too
    plain = NodeConfig.read(OWN)
    assert (plain.min_clip, plain.methods, plain.code_hash, plain.retention_days) == (None,) * 4
    assert plain.adapt(config) == config
    drawn = compose(["method=ffa_lora", "model=tiny_random"])
    assert node.adapt(drawn).model == drawn.model  # random weights lie nowhere
