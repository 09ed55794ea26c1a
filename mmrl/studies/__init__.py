"""What stands above the loop and uses it: soups, distilled rewards, spread labels, knowledge and sweeps."""
