"""``python -m mmrl``: the command line, where the script ``mmrl`` is not on the path."""

from mmrl.cli import command

if __name__ == "__main__":
    command()
