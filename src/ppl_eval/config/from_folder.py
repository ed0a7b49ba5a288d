"""Complete a config's sections by what the checkpoint's folder says."""

from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.config.schema import TEACHER_COMPONENTS, EvalConfig
from ppl_eval.errors import UserError
from ppl_eval.model import from_folder as folders

_NOT_NEEDED = ("checkpoint_files", "output_dir")
"""Arguments of torchtune's checkpointers: the files are found in the folder, none is written."""


def complete(config: EvalConfig) -> None:
    """Complete tokenizer, model and checkpointer, and those of a teacher, from their folders.

    A section without a ``_component_`` is what the folder says. A section that names a component
    takes from the folder the arguments that the component still needs. Given keys win. There is no
    teacher if its sections are empty and it has no folder.

    Raises:
        UserError: no folder, or one that does not describe a model that torchtune knows; half a
            teacher.
    """
    described = ("model", "checkpointer", "tokenizer")
    if config.checkpoint_dir is not None:
        for key in described:
            _complete_section(config, key, config.checkpoint_dir, "checkpoint_dir")
    open_sections = [key for key in described if "_component_" not in getattr(config, key)]
    if open_sections:
        raise UserError(
            "checkpoint_dir is not set: set checkpoint_dir=DIR, a Hugging Face folder, or"
            f" name what builds {' and '.join(open_sections)} by _component_"
        )
    if config.teacher_checkpointer.get("checkpoint_dir", "") is None:  # teacher_checkpoint_dir=null
        config.teacher_model, config.teacher_checkpointer = {}, {}
    if config.teacher_checkpoint_dir is not None:
        for key in TEACHER_COMPONENTS:
            _complete_section(config, key, config.teacher_checkpoint_dir, "teacher_checkpoint_dir")
    _refuse_half_a_teacher(config)


def leave_open(node: dict[str, Any], key: str) -> None:
    """Give a torchtune checkpointer null for the arguments that an evaluation does not need."""
    accepted = components.parameters(node, key)
    for name in _NOT_NEEDED:
        if name in accepted:
            node.setdefault(name, None)


def _refuse_half_a_teacher(config: EvalConfig) -> None:
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


def _complete_section(config: EvalConfig, key: str, folder: str, folder_key: str) -> None:
    given = getattr(config, key)
    is_open = "_component_" not in given
    if not is_open and set(components.missing_arguments(given, key)) <= set(_NOT_NEEDED):
        return
    try:
        if key == "tokenizer":
            found = folders.sections(folder)
        else:
            found = folders.model_sections(folder, folder_key)
    except UserError:
        if is_open:
            raise
        return  # the check of the component names the missing argument
    section = found[key.removeprefix("teacher_")]
    if not is_open:
        section = _accepted(section, given, key, folder)
    setattr(config, key, {**section, **given})


def _accepted(
    section: dict[str, Any], given: dict[str, Any], key: str, folder: str
) -> dict[str, Any]:
    """The arguments from the folder that the named component takes; a model must take all."""
    component, accepted = given["_component_"], components.parameters(given, key)
    if key == "tokenizer" and str(component).startswith("torchtune."):
        return _tokenizer_files(given, "merges_file" in accepted, folder)
    if key.endswith("model"):
        unknown = [n for n in accepted if n not in {**section, **given} and "dropout" not in n]
        if unknown:
            raise UserError(
                f"{key}._component_ is {component}, and {folder}/config.json does not say"
                f" its {unknown[0]}: set {key}.{unknown[0]}=VALUE, or leave {key}._component_"
                " out"
            )
        lost = [name for name in section if name not in (*accepted, "_component_")]
        if lost:
            raise UserError(
                f"{key}._component_ is {component}, which has no {lost[0]}, but"
                f" {folder}/config.json says {lost[0]}={section[lost[0]]}: take a builder that has"
                f" it, as {section['_component_']} has"
            )
    return {name: value for name, value in section.items() if name in accepted}


def _tokenizer_files(given: dict[str, Any], has_merges: bool, folder: str) -> dict[str, Any]:
    """The files that a torchtune tokenizer reads: the folder alone is not enough for it."""
    names = {"path": "tokenizer.model"}
    if has_merges:
        names = {"path": "vocab.json", "merges_file": "merges.txt"}
    files = {key: Path(folder, name) for key, name in names.items() if key not in given}
    for key, file in files.items():
        if not file.is_file():
            raise UserError(
                f"tokenizer._component_ is {given['_component_']}, and there is no {file} for it:"
                f" set tokenizer.{key}=FILE, or leave tokenizer._component_ out"
            )
    return {key: str(file) for key, file in files.items()}
