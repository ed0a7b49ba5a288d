"""LoRA and DoRA adapters: read, checked, merged."""
