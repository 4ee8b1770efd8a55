"""The exceptions to the rules of this folder, each with its reason. An entry that is not needed fails a test."""

FILES_OVER_THE_SIZE: dict[str, str] = {}
"""Path -> why the file is better whole."""

FUNCTIONS_OVER_THE_SIZE: dict[str, str] = {}
"""`path::function` -> why the function is better whole."""

FILES_THAT_READ_THE_ENVIRONMENT: dict[str, str] = {
    "app/cli.py": "the command line is where the environment becomes arguments",
    "app/serve_environment.py": "Serve's own settings are environment variables only",
}

MODULES_WITHOUT_A_TEST_FILE: dict[str, str] = {
    "app/json_route.py": "tests/app/test_api_properties.py sends it random and hostile JSON",
    "app/openapi.py": "tests/app/test_api.py reads the document that it makes",
    "app/render.py": "tests/app/routes compares whole answers with the contract",
    "app/routes/context.py": "every test of tests/app/routes goes through it",
    "app/schemas/chat.py": "tests/app/routes/test_chat.py sends every field",
    "app/schemas/common.py": "tests/app/routes sends the shared fields to both kinds of completions",
    "app/schemas/completions.py": "tests/app/routes/test_completions.py sends every field",
    "app/schemas/moderations.py": "tests/app/routes/test_moderations.py sends every field",
    "loadtest/users/chat.py": "Locust patches the standard library: tests/loadtest/test_run.py runs it in a process",
}
"""Path -> where the module is tested instead."""
