"""Head masks in the files of other projects: `bosch mask export|import`."""
