"""Tool calls: the schemas that agents are shown, and checks of calls against them."""
