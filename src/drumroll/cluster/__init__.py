"""Workers on Ray: the only folder that imports it.

Session (`session`)       a private Ray, or a joined one, and the pool of devices it offers
  └─ Cluster (`cluster`)  the workers of one role: launch, dispatch, collect, errors that name the worker
       └─ Host (`host`)   the actor around one worker object
Arbiter (`residency`)     which role computes on which device; pure logic
WeightSync (`weights`)    trainers → engines; the worker-side halves, which need torch, are in `transport`
"""
