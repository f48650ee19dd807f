"""The stages of the pipeline, one package each; a stage's run() fills one directory."""
