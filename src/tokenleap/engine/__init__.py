"""The engine: requests join, advance together, and leave.

`llm_engine.LLMEngine` has all parts, and is what `LLM` and the command line call. `jobs` makes
requests of what a user asks for one prompt, with `prompts`. `strategies` turns a
`speculative_config` into a drafter, a controller and an acceptance rule. `worker` lets one thread
at a time own the engine. `scheduler` decides which requests run in a step, and advances them with
`decode.step`; `prefix_cache` keeps the KV of earlier prompts.
"""
