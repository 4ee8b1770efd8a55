"""The exceptions to the rules of this folder, each with its reason. An entry that is not needed fails a test."""

FILES_OVER_THE_SIZE: dict[str, str] = {}
"""Path -> why the file is better whole."""

FUNCTIONS_OVER_THE_SIZE: dict[str, str] = {
    "kernels/paged_attention/kernel.py::paged_attention_kernel": "one program of a GPU: its state is its registers",
}
"""`path::function` -> why the function is better whole."""

FILES_THAT_READ_THE_ENVIRONMENT: dict[str, str] = {
    "app/cli.py": "the command line is where the environment becomes arguments",
    "kernels/compiling.py": "compilers and caches are named by conventions of the machine",
    "app/serve_environment.py": "Serve's own settings are environment variables only",
}

MODULES_WITHOUT_A_TEST_FILE: dict[str, str] = {
    "app/json_route.py": "tests/app/test_api_properties.py sends it random and hostile JSON",
    "app/blocks.py": "tests/app/responses_api and messages_api compare what whole answers and streams make of blocks",
    "app/field_names.py": "tests/app/responses_api/test_asked.py reads the names that its errors tell",
    "app/messages_api/schemas.py": "tests/app/messages_api/test_asked.py sends every field and every wrong one",
    "app/responses_api/schemas.py": "tests/app/responses_api/test_asked.py sends every field and every wrong one",
    "app/routes/messages.py": "every test of tests/app/messages_api goes through it",
    "app/routes/responses.py": "every test of tests/app/responses_api goes through it",
    "app/openapi.py": "tests/app/test_api.py reads the document that it makes",
    "app/render.py": "tests/app/routes compares whole answers with the contract",
    "app/routes/context.py": "every test of tests/app/routes goes through it",
    "app/schemas/chat.py": "tests/app/routes/test_chat.py sends every field",
    "app/schemas/completions.py": "tests/app/routes/test_completions.py sends every field",
    "app/schemas/tools.py": "tests/app/routes/test_chat_tools.py sends every form, test_field_errors.py the wrong ones",
    "app/schemas/structured.py": "tests/app/test_structure.py makes grammars of every form",
    "app/schemas/tokens.py": "tests/app/routes/test_tokens.py sends every field",
    "app/schemas/wire.py": "tests/app/test_field_errors.py sends what it refuses",
    "app/schemas/moderations.py": "tests/app/routes/test_moderations.py sends every field",
    "deployments/accounts/actor.py": "tests/deployments/accounts/test_meter.py asks one in its own process",
    "deployments/accounts/values.py": "every test of tests/deployments/accounts passes them",
    "deployments/answering.py": "tests/deployments/test_gateway.py reads answers, whole, refused, cut and resumed",
    "deployments/control_tokens.py": "tests/deployments/test_text_codec.py types them",
    "deployments/engine_thread.py": "every test of tests/deployments/test_gateway.py runs its engine in one",
    "deployments/errors.py": "tests/deployments/test_gateway.py loses replicas",
    "deployments/generation_calls.py": "tests/deployments/test_gateway.py makes every call and every fault",
    "deployments/generation.py": "tests/deployments/test_gateway.py makes requests of every kind of prompt",
    "deployments/handle_errors.py": "tests/deployments/test_safety.py unwraps what an actor raised",
    "deployments/handles.py": "tests/deployments/test_gateway.py runs with both kinds of source",
    "deployments/metrics.py": "tests/e2e/test_serving.py scrapes and parses them",
    "deployments/model_replica.py": "tests/deployments/test_gateway.py calls, cancels and kills it",
    "deployments/resumption.py": "tests/deployments/test_gateway.py kills replicas in mid-stream",
    "deployments/served_model.py": "tests/deployments/test_gateway.py reads answers of served models",
    "deployments/token_pieces.py": "tests/deployments/stream/test_detokenizer_properties.py decodes by it",
    "engine/attention.py": "tests/engine/test_backend.py attends by it with every backend",
    "engine/block_tables.py": "tests/engine/test_scheduler_properties.py drives it through every end of a request",
    "engine/buffers.py": "tests/parity compares what is computed from them with transformers",
    "engine/build.py": "tests/parity builds every engine by it",
    "engine/decoder/decoder.py": "tests/parity/test_families.py compares its logits with transformers",
    "engine/errors.py": "tests of those who raise them read their fields",
    "engine/gpu/adapters.py": "tests/parity/test_triton_kernels.py compares its products with the CPU's",
    "engine/gpu/build.py": "tests/parity/test_triton_kernels.py builds every engine by it",
    "engine/gpu/choosing.py": "tests/kernels/gpu/test_token_choice.py compares it with the reference",
    "engine/gpu/staging.py": "tests/engine/gpu/test_inputs.py sends every step of random requests by it",
    "engine/gpu/runtime.py": "it needs a GPU: tests marked gpu and loadtest.gpu run it",
    "engine/pins.py": "tests/engine/test_scheduler_properties.py holds it to its bound",
    "engine/request.py": "tests/engine/test_scheduler_properties.py and test_sampler.py make requests of every kind",
    "engine/live_request.py": "tests/engine/test_scheduler_properties.py drives it",
    "engine/metrics.py": "tests/engine/test_engine.py and test_scheduler.py count with it",
    "engine/native_backend.py": "tests/engine/test_backend.py attends by it; tests/parity runs whole models on it",
    "engine/native_lora.py": "tests/parity/test_adapters.py compares it with peft, token by token",
    "engine/recorded.py": "tests/parity replays it in every test",
    "engine/step.py": "tests/engine/scripted.py checks every promise of a plan",
    "engine/step_draft.py": "tests/engine/test_scheduler_properties.py holds it to the budget",
    "kernels/architecture.py": "tests/kernels/test_ahead_of_time.py pretends to be on other GPUs",
    "kernels/launches.py": "tests/kernels/test_ahead_of_time.py compiles all of them",
    "kernels/search.py": "tests/kernels/gpu finds rows and segments by it",
    "loadtest/gpu/__main__.py": "it needs a GPU; its parts are run by tests/loadtest/test_gpu.py",
    "loadtest/gpu/engine.py": "tests/loadtest/test_gpu.py runs its rows on a tiny model",
    "loadtest/gpu/kernels.py": "tests/loadtest/test_gpu.py runs every one of its kernels",
    "loadtest/gpu/timing.py": "it needs a GPU's clock; tests/loadtest/test_gpu.py checks its floors",
    "loadtest/users/chat.py": "Locust patches the standard library: tests/loadtest/test_run.py runs it in a process",
}
"""Path -> where the module is tested instead."""
