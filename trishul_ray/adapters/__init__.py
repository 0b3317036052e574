"""How a frozen linear layer is adapted: kinds of adapters, layout, attach, merge, export."""
