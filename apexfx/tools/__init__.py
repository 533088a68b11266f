"""What the command line runs over the public surface: `demo`, `doctor`, `diagnose` and `simulate`. No other room imports them."""
