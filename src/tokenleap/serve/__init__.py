"""OpenAI's API over HTTP, on one engine: `tokenleap serve`, or `serve.app.create_app` in Python.

`app.py` joins the routers, one file per family of endpoints. A request becomes prompts and sampling
parameters (`fields.py`, `fields.py`, `chat.py`), runs in the engine (`running.py`), and is
answered whole or as server-sent events (`rendering.py`). Nothing here computes in the event loop.
"""
