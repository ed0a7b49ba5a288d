"""The folders and files that a config names are there: told before torch is imported."""

from ppl_eval.data.corpus import check_files
from ppl_eval.model.folder import need_folder
from ppl_eval.schema import EvalConfig


def check(config: EvalConfig) -> None:
    """Refuse paths that lead nowhere.

    Components of one's own may mean something else by a path.

    Raises:
        UserError: naming the key and the path.
    """
    folders = {
        "checkpoint_dir": config.checkpointer,
        "teacher_checkpoint_dir": config.teacher_checkpointer,
    }
    for key, node in folders.items():
        folder = node.get("checkpoint_dir")
        if str(node.get("_component_")).startswith("torchtune.") and isinstance(folder, str):
            need_folder(folder, key)
    if config.adapter.dir is not None:
        need_folder(config.adapter.dir, "adapter.dir")
    for node in (config.dataset, *config.dataset.get("corpora", {}).values()):
        if node["_component_"] == "ppl_eval.data.text_corpus":
            check_files(node)
