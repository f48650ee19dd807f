"""Colours of pages and charts."""

# Light and dark; the names are the style sheet's variables.
COLOURS = {
    "page": ("#f6f7f9", "#10151a"), "card": ("#ffffff", "#181f26"), "ink": ("#16202b", "#e8edf2"),
    "soft": ("#586574", "#9dabb9"), "rule": ("#e1e6eb", "#2b353f"), "band": ("#eef2f6", "#1e2730"),
    "full": ("#0b5c9e", "#62b5f0"), "sliding": ("#f3c37a", "#7a5a2a"),
    "original": ("#2b3540", "#d5dde5"), "hybrid": ("#0072b2", "#56b4e9"),
    "untrained": ("#c9530a", "#f08a4b"), "third": ("#3f8f5f", "#67c28b"),
    "fourth": ("#8a6bb1", "#b59ad6"), "fifth": ("#d99a2b", "#e6b450"),
    "sixth": ("#b8436d", "#ec86ab"), "seventh": ("#4a9aa8", "#7cc8d4"),
    "note": ("#fff6e2", "#2b2616"), "note-rule": ("#e0a92e", "#b98a2a"),
}  # fmt: skip
