"""What a config's sections leave open is completed by what the checkpoint's folder says."""

from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.config.schema import TEACHER_COMPONENTS, EvalConfig
from ppl_eval.errors import UserError
from ppl_eval.model import from_folder as folders

_FOUND_LATER = ("checkpoint_files", "output_dir")


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
            _complete_section(config, key, "checkpoint_dir")
    open_sections = [key for key in described if not _names_component(config, key)]
    if open_sections:
        raise UserError(
            "checkpoint_dir is not set: set checkpoint_dir=DIR, a Hugging Face folder, or"
            f" name what builds {' and '.join(open_sections)} by _component_"
        )
    if config.teacher_checkpointer.get("checkpoint_dir", "") is None:  # teacher_checkpoint_dir=null
        config.teacher_model, config.teacher_checkpointer = {}, {}
    if config.teacher_checkpoint_dir is not None:
        for key in TEACHER_COMPONENTS:
            _complete_section(config, key, "teacher_checkpoint_dir")
    _refuse_half_a_teacher(config)


def leave_open(node: dict[str, Any], key: str) -> None:
    """Give a torchtune checkpointer null for what an evaluation does not need.

    These are the names of the files, which are found in the folder, and the folder to write to.
    """
    accepted = components.argument_names(node, key)
    for name in _FOUND_LATER:
        if name in accepted:
            node.setdefault(name, None)


def _names_component(config: EvalConfig, key: str) -> bool:
    return "_component_" in getattr(config, key)


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


def _complete_section(config: EvalConfig, key: str, folder_key: str) -> None:
    given, folder = getattr(config, key), getattr(config, folder_key)
    is_open = not _names_component(config, key)
    if not is_open and set(components.missing_arguments(given, key)) <= set(_FOUND_LATER):
        return
    try:
        if key == "tokenizer":
            found = folders.sections(folder)
        else:
            found = folders.model_sections(folder, folder_key)
    except UserError:
        if is_open:
            raise
        return  # the check of the component will say what it lacks
    said = found[key.removeprefix("teacher_")]
    if not is_open:
        said = _accepted(said, given, key, folder)
    setattr(config, key, {**said, **given})


def _accepted(said: dict[str, Any], given: dict[str, Any], key: str, folder: str) -> dict[str, Any]:
    """The arguments from the folder that the named component takes; a model must take all."""
    component, accepted = given["_component_"], components.argument_names(given, key)
    if key == "tokenizer" and str(component).startswith("torchtune."):
        return _tokenizer_files(given, "merges_file" in accepted, folder)
    if key.endswith("model"):
        open_ones = [n for n in accepted if n not in {**said, **given} and "dropout" not in n]
        if open_ones:
            raise UserError(
                f"{key}._component_ is {component}, and {folder}/config.json does not say"
                f" its {open_ones[0]}: set {key}.{open_ones[0]}=VALUE, or leave {key}._component_"
                " out"
            )
        lost = [name for name in said if name not in (*accepted, "_component_")]
        if lost:
            raise UserError(
                f"{key}._component_ is {component}, which has no {lost[0]}, but"
                f" {folder}/config.json says {lost[0]}={said[lost[0]]}: take a builder that has it,"
                f" as {said['_component_']} has"
            )
    return {name: value for name, value in said.items() if name in accepted}


def _tokenizer_files(given: dict[str, Any], has_merges: bool, folder: str) -> dict[str, Any]:
    """torchtune's tokenizers read files, whose folder is not enough for them."""
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
