"""How a module is spread over ranks: one file per dimension, `apply` the only place that knows their order."""
