"""A game of 20 objects and 16 properties whose answers are all yes or no, so that tests can count by hand."""

OBJECTS = (
    "airplane", "apple", "backpack", "banana", "bee", "book", "car", "carrot", "dog", "elephant",
    "frog", "horse", "kite", "knife", "pencil", "piano", "ring", "rose", "shirt", "tree",
)  # fmt: skip
PROPERTIES = (
    "man_made", "shoebox", "noise", "one_hand", "bigger", "animal", "kitchen", "swim",
    "metal", "jump", "container", "fly", "wearable", "wood", "fruit", "round",
)  # fmt: skip
