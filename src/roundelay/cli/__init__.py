"""The command line: `main` dispatches, and each command is a module with EXAMPLES, add_arguments(parser) and run(args)."""
