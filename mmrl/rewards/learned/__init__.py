"""What rewards that were trained here need: their folders, encoders and formulas. The studies train them."""
