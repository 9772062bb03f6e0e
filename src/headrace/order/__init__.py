"""The order of an epoch's samples, as a pure function of integers.

Ranks and workers compute their shares of it arithmetically.
"""

from headrace.order.drawn import BalancedOrder, BucketedOrder, WeightedOrder
from headrace.order.epoch import EpochOrder, Order, ResizedOrder
from headrace.order.ranks import BatchRequest, OrderSampler, RankBatches
from headrace.order.seeding import seed_everything
from headrace.order.world import World, detect_world

__all__ = [
    "BalancedOrder",
    "BatchRequest",
    "BucketedOrder",
    "EpochOrder",
    "Order",
    "OrderSampler",
    "RankBatches",
    "ResizedOrder",
    "WeightedOrder",
    "World",
    "detect_world",
    "seed_everything",
]  # fmt: skip
