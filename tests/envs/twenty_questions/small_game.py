"""A game of 20 objects and 16 properties whose answers are all yes or no, so that tests can count by hand."""

OBJECTS = (
    "airplane", "apple", "backpack", "bee", "book", "car", "carrot", "corn", "dog", "elephant",
    "frog", "horse", "kite", "knife", "pencil", "piano", "ring", "rose", "shirt", "tree",
)  # fmt: skip
PROPERTIES = (
    "man_made", "alive", "noise", "clothing", "bigger", "animal", "kitchen", "swim",
    "metal", "jump", "underground", "fly", "wearable", "wood", "fruit", "tail",
)  # fmt: skip
