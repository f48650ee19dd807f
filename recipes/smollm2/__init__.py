"""SmolLM2-135M-Instruct for a machine without the hub."""
