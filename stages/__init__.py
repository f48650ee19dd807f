"""The six stages of the pipeline; each calls bosch or data_prep and writes one directory."""
