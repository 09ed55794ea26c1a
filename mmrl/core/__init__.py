"""What all else is built on: data of the loop, files, errors, media, protocols. It imports nothing else of mmrl."""
