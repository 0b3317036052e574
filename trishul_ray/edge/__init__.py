"""Stages between a client's round and the next global state; all of them are off by default.

A worker passes what a client would upload through a chain of filters (codecs, clipping, fixed
point), the server passes the mean through stages (noise, a server optimizer), and a
strategy draws the cohort. All of them act on the change of the shared part since the broadcast.
"""
