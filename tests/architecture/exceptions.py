"""The exceptions to the rules of this folder, each with its reason. An entry that is not needed fails a test."""

FILES_OVER_THE_SIZE: dict[str, str] = {}
"""Path -> why the file is better whole."""

FUNCTIONS_OVER_THE_SIZE: dict[str, str] = {}
"""`path::function` -> why the function is better whole."""

FILES_THAT_READ_THE_ENVIRONMENT: dict[str, str] = {
    "app/cli.py": "the command line is where the environment becomes arguments",
    "app/serve_environment.py": "Serve's own settings are environment variables only",
}

MODULES_WITHOUT_A_TEST_FILE: dict[str, str] = {}
"""Path -> where the module is tested instead."""
