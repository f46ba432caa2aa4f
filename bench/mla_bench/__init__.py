"""The one benchmark harness: what is measured, how it is timed, how it is stored and compared."""
