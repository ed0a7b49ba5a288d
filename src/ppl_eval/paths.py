"""The folders and files that a config names are there: told before torch is imported."""

from pathlib import Path

from ppl_eval.data.corpus import check_files
from ppl_eval.errors import UserError
from ppl_eval.schema import EvalConfig


def check(config: EvalConfig) -> None:
    """Refuse paths that lead nowhere.

    Raises:
        UserError: naming the key and the path.
    """
    folders = {
        "checkpoint_dir": config.checkpointer,
        "teacher_checkpoint_dir": config.teacher_checkpointer,
    }
    for key, node in folders.items():
        folder = node.get("checkpoint_dir")
        ours = str(node.get("_component_")).startswith("torchtune.")
        if ours and isinstance(folder, str) and not Path(folder).is_dir():
            raise UserError(f"{key} is {folder}, but there is no such folder")
    if config.adapter.dir is not None and not Path(config.adapter.dir).is_dir():
        raise UserError(f"adapter.dir is {config.adapter.dir}, but there is no such folder")
    for node in (config.dataset, *config.dataset.get("corpora", {}).values()):
        if node["_component_"] == "ppl_eval.data.text_corpus":
            check_files(node)
