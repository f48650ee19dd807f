"""Head masks in the files of other projects: `python -m pipeline mask export|import`."""
