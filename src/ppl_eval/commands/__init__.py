"""What `ppl-eval` does around a run: check, plan, compare, drop-layers."""
