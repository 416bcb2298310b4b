"""jaxcoll moves tensors between the states that a group of devices can hold them in, and refuses wrong moves."""

from jaxcoll.audit import audit as audit
from jaxcoll.collectives import all_gather as all_gather
from jaxcoll.collectives import all_reduce as all_reduce
from jaxcoll.collectives import all_to_all as all_to_all
from jaxcoll.collectives import contract as contract
from jaxcoll.collectives import declare_partial as declare_partial
from jaxcoll.collectives import reduce_scatter as reduce_scatter
from jaxcoll.collectives import take_shard as take_shard
from jaxcoll.collectives import uniform_cond as uniform_cond
from jaxcoll.show import show_states as show_states
from jaxcoll.states import State as State
from jaxcoll.states import StateError as StateError
from jaxcoll.states import describe as describe
from jaxcoll.states import state as state
from jaxcoll.states import states as states
from jaxcoll.topology import Topology as Topology
from jaxcoll.topology import TopologyError as TopologyError
