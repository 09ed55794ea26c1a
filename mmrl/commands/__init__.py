"""What every command shares: its arguments and options, reading a recipe, the console."""
