"""Run models: `engine.Engine` generates for many requests together, `server/` serves it over HTTP.

Imports run downwards: sampling, cache and ranks, weights, scheduler, runner, speculation, engine,
server.
"""
