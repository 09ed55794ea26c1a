"""Students of a judge: small encoders with a way to compare their sides."""
