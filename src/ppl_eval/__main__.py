"""``tune run ppl_eval`` and ``python -m ppl_eval`` run the shipped recipe, by path, as torchtune
runs its own."""

import runpy

from ppl_eval.shipped import recipe_path

runpy.run_path(str(recipe_path()), run_name="__main__")
