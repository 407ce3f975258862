"""From a PyTorch model to a Graph: operators over edges that say who sees them and how wide they are."""
