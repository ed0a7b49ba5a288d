"""What a config's sections leave open is filled in from the checkpoint's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.config.schema import TEACHER_COMPONENTS, EvalConfig
from ppl_eval.errors import UserError
from ppl_eval.model import from_folder as auto

_FOUND_LATER = ("checkpoint_files", "output_dir")


def from_folder(config: EvalConfig) -> None:
    """Sections without a ``_component_`` are what ``checkpoint_dir`` says; given keys win.

    A section that names a component takes from there what the component still needs.

    Raises:
        UserError: no folder, or one that does not describe a model that torchtune knows.
    """
    described = ("model", "checkpointer", "tokenizer")
    open_sections = [key for key in described if "_component_" not in getattr(config, key)]
    if config.checkpoint_dir is None:
        if open_sections:
            raise UserError(
                "checkpoint_dir is not set: set checkpoint_dir=DIR, a Hugging Face folder, or"
                f" name what builds {' and '.join(open_sections)} by _component_"
            )
        return
    _fill_in(config, config.checkpoint_dir, described, "checkpoint_dir")


def teacher_from_folder(config: EvalConfig) -> None:
    """As :func:`from_folder`; none of the sections, or no folder, means no teacher.

    Raises:
        UserError: half a teacher.
    """
    if config.teacher_checkpointer.get("checkpoint_dir", "") is None:  # teacher_checkpoint_dir=null
        config.teacher_model, config.teacher_checkpointer = {}, {}
    if config.teacher_checkpoint_dir is not None:
        _fill_in(
            config, config.teacher_checkpoint_dir, TEACHER_COMPONENTS, "teacher_checkpoint_dir"
        )
    given = [key for key in TEACHER_COMPONENTS if getattr(config, key).get("_component_")]
    if len(given) == 1:
        missing = next(key for key in TEACHER_COMPONENTS if key not in given)
        raise UserError(
            f"config: {given[0]} is given and {missing} is not: give both, or"
            " teacher_checkpoint_dir=DIR, a Hugging Face folder"
        )
    for key in TEACHER_COMPONENTS:
        if not given and getattr(config, key):
            raise UserError(
                f"config: {key} has no _component_, and there is no teacher_checkpoint_dir that"
                " says which: set teacher_checkpoint_dir=DIR"
            )


def _fill_in(config: EvalConfig, folder: str, keys: tuple[str, ...], name: str) -> None:
    for key in keys:
        given = getattr(config, key)
        is_open = "_component_" not in given
        if not is_open and set(components.lacks(given, key)) <= set(_FOUND_LATER):
            continue
        try:
            found = (
                auto.sections(folder) if key == "tokenizer" else auto.model_sections(folder, name)
            )
        except UserError:
            if is_open:
                raise
            continue  # the check of the component will say what it lacks
        said = found[key.removeprefix("teacher_")]
        said = said if is_open else _suited(said, given, key, folder)
        setattr(config, key, {**said, **given})


def _suited(said: dict[str, Any], given: dict[str, Any], key: str, folder: str) -> dict[str, Any]:
    """What the folder says, as far as the named component takes it; a model takes all of it."""
    taken = components.argument_names(given, key)
    if key == "tokenizer" and str(given["_component_"]).startswith("torchtune."):
        return _tokenizer_files(given, taken, folder)
    lost = [name for name in said if name not in (*taken, "_component_")]
    open_ones = [n for n in taken if n not in {**said, **given} and "dropout" not in n]
    if open_ones and key.endswith("model"):
        raise UserError(
            f"{key}._component_ is {given['_component_']}, and {folder}/config.json does not say"
            f" its {open_ones[0]}: set {key}.{open_ones[0]}=VALUE, or leave {key}._component_ out"
        )
    if lost and key.endswith("model"):
        raise UserError(
            f"{key}._component_ is {given['_component_']}, which has no {lost[0]}, but"
            f" {folder}/config.json says {lost[0]}={said[lost[0]]}: take a builder that has it, as"
            f" {said['_component_']} has"
        )
    return {name: value for name, value in said.items() if name in taken}


def _tokenizer_files(given: dict[str, Any], taken: Sequence[str], folder: str) -> dict[str, Any]:
    """torchtune's tokenizers read files, whose folder is not enough for them."""
    names = {"path": "tokenizer.model"}
    if "merges_file" in taken:
        names = {"path": "vocab.json", "merges_file": "merges.txt"}
    files = {key: Path(folder, name) for key, name in names.items() if key not in given}
    for key, file in files.items():
        if not file.is_file():
            raise UserError(
                f"tokenizer._component_ is {given['_component_']}, and there is no {file} for it:"
                f" set tokenizer.{key}=FILE, or leave tokenizer._component_ out"
            )
    return {key: str(file) for key, file in files.items()}


def checkpointer(node: dict[str, Any], key: str) -> None:
    """Keys that torchtune's checkpointers want and an evaluation can do without.

    The files are found in the folder, and nothing is written anywhere.
    """
    accepted = components.argument_names(node, key)
    for name in _FOUND_LATER:
        if name in accepted:
            node.setdefault(name, None)
