"""Run hybrid models with mlx-lm; its caches then hold only the window of a sliding head.

    python -m bosch.engines.mlx generate --model MODEL_DIR --prompt "…"

and every other command of mlx-lm. In a program, call `bosch.engines.mlx.models.register()` before
`mlx_lm.load`. `pip install .[mlx]` installs mlx-lm.
"""
