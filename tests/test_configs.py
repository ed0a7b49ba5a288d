"""Every shipped config: schema, components, names, and the commands in its header."""

import re
import shlex

import pytest
import torch
from torchtune._recipe_registry import get_all_recipes

from ppl_eval import shipped
from ppl_eval.config import COMPONENTS, known_keys, load, read_yaml
from ppl_eval.model.build import build_on_meta

STUDENT = str(shipped.embedded_path("tiny_student"))
TEACHER = str(shipped.embedded_path("tiny_teacher"))
NAMES = shipped.config_names()


def test_the_configs_are_found_and_none_has_a_name_of_torchtune():
    assert {"tiny_ppl_eval", "tiny_teacher_ppl_eval", "smollm2/135M_ppl_eval"} <= set(NAMES)
    theirs = {recipe.name for recipe in get_all_recipes()}
    theirs |= {config.name for recipe in get_all_recipes() for config in recipe.configs}
    assert not theirs & {*NAMES, *shipped.RECIPES}
    assert all(name.endswith("_ppl_eval") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_fits_the_schema_and_builds_its_model(name):
    folder = [f"checkpoint_dir={STUDENT}"] if name == "auto_ppl_eval" else []
    config = load(["--config", name, *folder])
    model = build_on_meta(config.model, torch.float32, {})
    assert all(p.is_meta for p in model.parameters())
    assert config.output_dir == f"./out/{name.replace('/', '_')}"
    assert config.protocol.max_seq_len <= model.max_seq_len or name == "auto_ppl_eval"


@pytest.mark.parametrize("name", NAMES)
def test_a_config_spells_out_every_key(name):
    """A reader of the file sees the whole surface."""
    content = read_yaml(shipped.config_path(name))

    def keys(node, prefix=""):
        for key, value in node.items():
            yield prefix + key
            if hasattr(value, "items") and prefix + key not in COMPONENTS:
                yield from keys(value, f"{prefix}{key}.")

    assert set(keys(content)) == set(known_keys())


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_the_header_parse(name):
    header = shipped.config_path(name).read_text().split("\n\n")[0]
    commands = [shlex.split(c) for c in re.findall(r"^#\s+(tune run .*)$", header, re.MULTILINE)]
    assert len(commands) >= 3
    assert any("--nproc_per_node" in command for command in commands)
    for command in commands:
        args = command[command.index("--config") :]
        assert args[1] == name
        args = [arg.replace("=DIR", f"={STUDENT}") for arg in args]
        config = load(args)
        if f"checkpoint_dir={STUDENT}" in args:
            assert config.tokenizer["path"] == config.checkpointer["checkpoint_dir"] == STUDENT
            assert config.dataset["data_files"] == "FILE.jsonl"
    if name != "auto_ppl_eval":
        pointed = load(["--config", name, f"checkpointer.checkpoint_dir={TEACHER}"])
        assert pointed.tokenizer["path"] == pointed.checkpointer["checkpoint_dir"] == TEACHER
