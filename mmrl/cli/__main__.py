from mmrl.cli import command

command()
