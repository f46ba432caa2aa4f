"""The build driver behind build.sh: one small module a step. Nothing here ships in the wheel."""
