"""The engine: requests join, advance together, and leave.

`llm_engine.LLMEngine` owns everything and is what `LLM` and the command line call.
`scheduler.Scheduler` decides which requests run in a step, and advances them with `decode.step`.
`prompts` and `request_maker` turn a user's prompts into requests. `strategies` turns a
`speculative_config` into a drafter, a controller and an acceptance rule. `kv_budget` and
`prefix_cache` manage KV memory. `turns` lets several threads share one engine.
"""
