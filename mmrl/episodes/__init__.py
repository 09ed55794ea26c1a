"""Episodes: a policy that acts over several turns, with tools, in an environment."""
