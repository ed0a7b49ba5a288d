"""Programs that made the embedded checkpoints and their text.

Only a clone has them: the package imports none of them, and they are not in the wheel.
"""
