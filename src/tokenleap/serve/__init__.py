"""OpenAI's API over HTTP, on one engine: `tokenleap serve`, or `serve.app.create_app` in Python.

`app.py` joins the routers, one file per family of endpoints. A request becomes prompts and sampling
parameters (`fields.py`, `chat.py`), runs in the engine, and is answered whole or as server-sent
events (`running.py`). Nothing here computes in the event loop.
"""
