"""``tune run ppl_eval`` and ``python -m ppl_eval`` run the shipped recipe by its path."""

import runpy
import sys

from ppl_eval import boundary
from ppl_eval.config import command_line as config
from ppl_eval.ranks import Ranks
from ppl_eval.shipped import recipe_path

# one process reports a wrong command line before the recipe imports torch; several ranks need torch
# to decide which of them reports it
if Ranks.from_env().world_size == 1:
    boundary.guarded(lambda: config.load_for_run(sys.argv[1:]))

runpy.run_path(str(recipe_path()), run_name="__main__")
