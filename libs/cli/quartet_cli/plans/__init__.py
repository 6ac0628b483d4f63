"""Plans on a screen: what ``quartet plan`` prints, and what its JSON consists of."""
