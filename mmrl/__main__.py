"""``python -m mmrl``: the command line, where the script ``mmrl`` is not on the path."""

from mmrl.cli import main

if __name__ == "__main__":
    main()
